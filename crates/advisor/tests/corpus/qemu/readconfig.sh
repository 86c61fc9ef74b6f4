qemu-system-x86_64 -readconfig vm.cfg -m 1G
