"""The cable between two network namespaces. Damages one frame for each byte that it reads from standard input.

    cable.py NAMESPACE NAMESPACE

Creates an interface eth0 in both and forwards frames between them. A damaged frame has two different 16-bit words of a TCP payload
exchanged, so that TCP's checksum, a sum of such words, remains valid. Prints `ready`, and `damaged` after each damaged frame. Ends if
there is no frame to damage for a minute.
"""

import fcntl, os, select, signal, struct, subprocess, sys

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
ETHERNET, IPV4, TCP = 14, 0x0800, 6
# Launchers send messages of about 270 bytes, and handshakes are shorter. A damaged word should be one of a tensor.
LEAST = 500


def interface(namespace, name):
    """Creates an interface eth0 in a namespace. Returns the file of its frames."""
    frames = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(frames, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "netns", namespace, "name", "eth0"], check=True)
    return frames


def damaged(frame, ends):
    """Returns the frame with two words in the middle of its TCP payload exchanged, or None if it has no long payload or repeats one.

    `ends` has the sequence number after the last byte from each sender. Receivers ignore bytes that are sent again.
    """
    kind, protocol = struct.unpack_from("!12xH", frame)[0], frame[ETHERNET + 9] if len(frame) > ETHERNET + 20 else None
    if kind != IPV4 or protocol != TCP:
        return None
    tcp = ETHERNET + 4 * (frame[ETHERNET] & 15)
    payload = tcp + 4 * (frame[tcp + 12] >> 4)
    end = ETHERNET + struct.unpack_from("!H", frame, ETHERNET + 2)[0]
    sender, (start,) = frame[ETHERNET + 12 : ETHERNET + 20] + frame[tcp : tcp + 4], struct.unpack_from("!I", frame, tcp + 4)
    # Sequence numbers start again after 2³².
    if (start - ends.get(sender, start)) % 2**32 >= 2**31:
        return None
    ends[sender] = start + end - payload
    if end - payload < LEAST:
        return None
    middle = payload + (end - payload) // 8 * 4
    for at in range(middle, end - 4, 2):
        first, second = frame[at : at + 2], frame[at + 2 : at + 4]
        if first != second:
            return frame[:at] + second + first + frame[at + 4 :]
    return None


def main():
    files = [interface(namespace, f"zt{os.getpid()}-{index}") for index, namespace in enumerate(sys.argv[1:])]
    other = dict(zip(files, reversed(files)))
    print("ready", flush=True)
    wanted, ends = 0, {}
    while True:
        for ready in select.select([0, *files], [], [])[0]:
            if ready == 0:
                requested = os.read(0, 1)
                if not requested:
                    return
                wanted += 1
                signal.alarm(60)
                continue
            frame = os.read(ready, 65536)
            worse = damaged(frame, ends)
            try:
                os.write(other[ready], worse if worse and wanted else frame)
            except OSError:
                continue  # the other end is down
            if worse and wanted:
                wanted -= 1
                signal.alarm(0)
                print("damaged", flush=True)


main()
