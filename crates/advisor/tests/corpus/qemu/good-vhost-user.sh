qemu-system-x86_64 -accel kvm -smp 4 -object memory-backend-memfd,id=mem,size=4G,share=on -m 4G \
  -machine q35,memory-backend=mem -chardev socket,id=vm1,path=/run/ringdisk/vm1.sock,reconnect-ms=1000 \
  -device vhost-user-blk-pci,chardev=vm1,num-queues=4,queue-size=256
