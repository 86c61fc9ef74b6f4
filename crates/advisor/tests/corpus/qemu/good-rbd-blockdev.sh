export LD_LIBRARY_PATH=/usr/local/lib:/usr/local/lib64
LD_PRELOAD=/usr/lib64/libtcmalloc.so /usr/libexec/qemu-kvm -m 16384 -smp 16 -M q35 \
  --blockdev rbd,node-name=rbd0,cache.direct=on,discard=unmap,pool=libvirt-pool,image=CentOS8 \
  -object iothread,id=iothread0 -device virtio-blk-pci,iothread=iothread0,drive=rbd0,id=virtioblk0
