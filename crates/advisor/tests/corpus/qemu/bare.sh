qemu-system-x86_64 disk.img
