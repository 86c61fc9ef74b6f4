# A throttle group without limits, as Proxmox makes one for each disk.
qemu-system-x86_64 -accel kvm -machine pc-q35-9.1 -smp 4 -m 4096 \
  -object iothread,id=io1 \
  -object '{"qom-type":"throttle-group","id":"throttle-a","limits":{}}' \
  -blockdev '{"driver":"throttle","throttle-group":"throttle-a","node-name":"a","discard":"unmap","file":{"driver":"raw","discard":"unmap","file":{"driver":"host_device","filename":"/dev/vg0/a","aio":"native","discard":"unmap","cache":{"direct":true}}}}' \
  -device virtio-blk-pci,drive=a,iothread=io1
