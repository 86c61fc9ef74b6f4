# as libvirt writes it
/usr/bin/qemu-system-x86_64 -name guest=json,debug-threads=on \
  -machine pc-q35-9.0,usb=off,dump-guest-core=off -accel kvm -m size=4194304k \
  -smp 4,sockets=4,cores=1,threads=1 \
  -object '{"qom-type":"iothread","id":"iothread1"}' \
  -blockdev '{"driver":"host_device","filename":"/dev/vg0/vm","node-name":"libvirt-1-storage","auto-read-only":true,"discard":"unmap","cache":{"direct":true,"no-flush":false},"aio":"native"}' \
  -blockdev '{"node-name":"libvirt-1-format","read-only":false,"discard":"unmap","cache":{"direct":true,"no-flush":false},"driver":"raw","file":"libvirt-1-storage"}' \
  -device '{"driver":"virtio-blk-pci","iothread":"iothread1","drive":"libvirt-1-format","id":"virtio-disk0","bootindex":1,"write-cache":"on"}'
