qemu-system-x86_64 -accel kvm -machine q35 -smp 4 -m 8G \
  -object iothread,id=io1 \
  -drive file=/dev/vg0/vm1,format=raw,if=none,id=d1,cache=none,aio=native,discard=unmap \
  -device virtio-blk-pci,drive=d1,iothread=io1
