qemu-system-x86_64 -accel kvm -machine pc-q35-9.1 -smp 4 -m 4096 \
  -object iothread,id=io1 -object throttle-group,id=bronze,x-iops-total=300,x-iops-total-max=600 \
  -blockdev driver=file,filename=/vms/a.img,node-name=f1,cache.direct=on,aio=io_uring,discard=unmap \
  -blockdev driver=raw,file=f1,node-name=d1,cache.direct=on,discard=unmap \
  -blockdev driver=throttle,throttle-group=bronze,file=d1,node-name=t1,cache.direct=on,discard=unmap \
  -device virtio-blk-pci,drive=t1,iothread=io1
