# A drive with limits of 0, which are none.
qemu-system-x86_64 -accel kvm -machine pc-q35-9.1 -smp 4 -m 4096 \
  -object iothread,id=io1 \
  -drive file=/dev/vg0/b,format=raw,if=none,id=b,cache=none,aio=native,discard=unmap,iops=0,throttling.bps-total=0,throttling.group=g \
  -device virtio-blk-pci,drive=b,iothread=io1
