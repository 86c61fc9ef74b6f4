qemu-system-x86_64 -accel kvm -smp 2 -m 2G -drive file=/vms/a.img,format=raw,if=virtio,cache=none,aio=io_uring
