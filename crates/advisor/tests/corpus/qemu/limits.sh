# A drive with limits in both of their syntaxes.
qemu-system-x86_64 -accel kvm -machine q35 -smp 4 -m 8G \
  -object iothread,id=io1 \
  -drive file=/dev/vg0/vm1,format=raw,if=none,id=d1,cache=none,aio=native,discard=unmap,bps=104857600,throttling.iops-read=800,throttling.iops-write=400,iops_size=8192 \
  -device virtio-blk-pci,drive=d1,iothread=io1,serial=S-1,logical_block_size=4096,physical_block_size=4096
