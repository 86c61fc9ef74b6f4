qemu-system-x86_64 -accel kvm -M q35 -smp 8 -m 8G \
  -object iothread,id=io0 -object iothread,id=io1 \
  -drive file=/dev/vg0/vm1,format=raw,if=none,id=d1,cache=none,aio=native,discard=unmap \
  -device '{"driver":"virtio-blk-pci","drive":"d1","num-queues":4,"iothread-vq-mapping":[{"iothread":"io0"},{"iothread":"io1"}]}'
