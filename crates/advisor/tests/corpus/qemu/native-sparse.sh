qemu-system-x86_64 -accel kvm -smp 2 -object iothread,id=i0 -drive file=/vms/sparse.img,format=raw,if=none,id=a,cache=none,aio=native -device virtio-blk-pci,drive=a,iothread=i0
