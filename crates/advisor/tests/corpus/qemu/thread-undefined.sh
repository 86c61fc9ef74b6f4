qemu-system-x86_64 -accel kvm -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=none,aio=native,discard=unmap -device virtio-blk-pci,drive=a,iothread=io7
