# Runs in the guest, on the host's files: pytest, and its exit status behind a marker. The host fills in what is in braces.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LANG=C.UTF-8
export FLANNELD_GUEST=1 PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis
export MODPROBE_OPTIONS='-d {kernel}'
# Modules are loaded as they are asked for, from where the kernel was unpacked.
printf '#!/bin/sh\nexec modprobe -d "%s" "$@"\n' '{kernel}' >/tmp/modprobe
chmod 755 /tmp/modprobe
echo /tmp/modprobe >/proc/sys/kernel/modprobe
modprobe -a tun br_netfilter fou
ip link set lo up
cd '{project}'
echo '{begin}'
'{python}' -m pytest -q --color=no --timeout=600 -p no:cacheprovider --basetemp=/tmp/pytest {arguments}
echo "{end} $?"
echo o >/proc/sysrq-trigger
sleep 60
