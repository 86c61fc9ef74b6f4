qemu-system-x86_64 -accel kvm -smp 8 -machine q35 -device vfio-pci,host=0000:03:00.0 \
  -object iothread,id=i0,poll-max-ns=0 -chardev socket,id=spdk,path=/var/tmp/vhost.0 \
  -object memory-backend-memfd,id=mem,size=128M,share=on -machine memory-backend=mem \
  -device vhost-user-scsi-pci,chardev=spdk \
  -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=none,aio=native,discard=unmap -device virtio-blk-pci,drive=a,iothread=i0 \
  -drive file=/dev/vg0/b,format=raw,if=none,id=b,cache=none,aio=native,discard=unmap,throttling.iops-total=100 -device virtio-blk-pci,drive=b,iothread=i0
