qemu-system-x86_64 -accel kvm -object iothread,id=i0 -drive file=/vms/a.img,format=raw,if=none,id=a,aio=native -device virtio-blk-pci,drive=a,iothread=i0
