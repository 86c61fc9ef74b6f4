qemu-system-x86_64 -accel kvm -object iothread,id=i0 \
  -blockdev driver=raw,node-name=a,file.driver=file,file.filename=/vms/a.img \
  -device virtio-blk-pci,drive=a,iothread=i0
