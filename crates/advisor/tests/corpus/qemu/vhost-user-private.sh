qemu-system-x86_64 -accel kvm -m 2G -smp 2 -chardev socket,id=vm1,path=/run/ringdisk/vm1.sock \
  -device vhost-user-blk-pci,chardev=vm1,num-queues=2,queue-size=256
