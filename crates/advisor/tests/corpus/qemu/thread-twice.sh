qemu-system-x86_64 -accel kvm -smp 4 -object iothread,id=i0 -object iothread,id=i1 \
  -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=none,aio=native,discard=unmap \
  -device '{"driver":"virtio-blk-pci","drive":"a","iothread":"i0","iothread-vq-mapping":[{"iothread":"i0"},{"iothread":"i1"}]}'
