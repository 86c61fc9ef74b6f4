# names with commas, spaces and quotes
sudo nice -n 5 env FOO=1 "/usr/bin/qemu-system-x86_64" -accel kvm -name "my vm" -drive "file=/vms/a,,b c.img,format=raw,if=none,id=a,cache=none,aio=io_uring" -device 'virtio-blk-pci,drive=a' ; echo done
