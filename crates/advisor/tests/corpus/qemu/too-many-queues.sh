qemu-system-x86_64 -accel kvm -smp 2 -object iothread,id=i0 -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=none,aio=native,discard=unmap -device virtio-blk-pci,drive=a,iothread=i0,num-queues=16
