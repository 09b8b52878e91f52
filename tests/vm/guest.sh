# Runs in the guest, on the host's files: pytest, several at a time, and their exit status behind a marker.
# The host fills in what is in braces.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LANG=C.UTF-8
export FLANNELD_GUEST=1 FLANNELD_GUEST_REFERENCE_S={reference} PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis {passed}
export MODPROBE_OPTIONS='-d {kernel}'
# Modules are loaded as they are asked for, from where the kernel was unpacked.
printf '#!/bin/sh\nexec modprobe -d "%s" "$@"\n' '{kernel}' >/tmp/modprobe
chmod 755 /tmp/modprobe
echo /tmp/modprobe >/proc/sys/kernel/modprobe
modprobe -a tun br_netfilter fou
ip link set lo up
cd '{project}'
# pytest with the arguments after the first, which marks its lines.
run() {
    mark=$1
    shift
    '{python}' -m pytest -v --color=no --timeout=900 -p no:cacheprovider --basetemp="/tmp/pytest${mark%%|*}" "$@" 2>&1 |
        sed -u "s/^/$mark/"
    return "${PIPESTATUS[0]}"
}
echo '{begin}'
runs=()
{runs}
status=0
for run in "${runs[@]}"; do
    wait "$run" || status=$?
done
echo "{end} $status"
echo o >/proc/sysrq-trigger
sleep 60
