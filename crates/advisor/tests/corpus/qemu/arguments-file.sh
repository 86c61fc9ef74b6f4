qemu-system-x86_64 -accel kvm @more.args -m 1G
