qemu-system-x86_64 -accel kvm -smp 4 -object iothread,id=i0 -object iothread,id=i1 \
  -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=none,aio=native,discard=unmap \
  -device '{"driver":"virtio-blk-pci","drive":"a","num-queues":4,"iothread-vq-mapping":[{"iothread":"i0","vqs":[0,1]},{"iothread":"i1","vqs":[2]}]}'
