package netlink

import (
	"encoding/binary"
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// Of the two messages, only one is from the kernel: its answer to an unknown request.
func TestOnlyMessagesOfTheKernelAreRead(t *testing.T) {
	socket, err := Open(unix.NETLINK_GENERIC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	other, err := Open(unix.NETLINK_GENERIC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	own, err := unix.Getsockname(int(socket.Fd()))
	if err == nil {
		err = unix.Sendto(int(other.Fd()), make([]byte, 20), 0, own)
	}
	if err == nil {
		message := make([]byte, unix.SizeofNlMsghdr)
		binary.NativeEndian.PutUint32(message, uint32(len(message)))
		binary.NativeEndian.PutUint16(message[4:], 0xffff)
		binary.NativeEndian.PutUint16(message[6:], unix.NLM_F_REQUEST|unix.NLM_F_ACK)
		_, err = socket.Write(message)
	}
	if err != nil {
		t.Skipf("it sends to a netlink socket: %v: run it as root", err)
	}
	var buffer [1 << 10]byte
	if _, err := Receive(socket, buffer[:]); !errors.Is(err, ErrForeign) {
		t.Errorf("somebody else's\nwant %v\ngot  %v", ErrForeign, err)
	}
	if n, err := Receive(socket, buffer[:]); err != nil || n < unix.SizeofNlMsghdr || binary.NativeEndian.Uint16(buffer[4:]) != unix.NLMSG_ERROR {
		t.Errorf("the kernel's\nwant its answer\ngot  %x, error %v", buffer[:n], err)
	}
}
