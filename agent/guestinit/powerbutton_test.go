package guestinit

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// attribute returns an attribute of a netlink message.
func attribute(kind uint16, value []byte) []byte {
	length := unix.SizeofNlAttr + len(value)
	b := binary.NativeEndian.AppendUint16(nil, uint16(length))
	b = append(binary.NativeEndian.AppendUint16(b, kind), value...)
	return append(b, make([]byte, aligned(length)-length)...)
}

// acpiEvent returns a message of a family as acpi_bus_generate_netlink_event makes it.
func acpiEvent(family uint16, class string) []byte {
	event := make([]byte, 44)
	copy(event, class)
	copy(event[acpiClassBytes:], "LNXPWRBN:00")
	b := make([]byte, netlinkHeaders)
	binary.NativeEndian.PutUint16(b[4:], family)
	b[unix.SizeofNlMsghdr] = acpiCommand
	return append(b, attribute(acpiAttribute, event)...)
}

func TestOtherACPIEventsAreNotThePowerButton(t *testing.T) {
	for _, test := range []struct {
		name    string
		message []byte
		want    bool
	}{
		{"pressed", acpiEvent(30, "button/power"), true},
		{"another family", acpiEvent(31, "button/power"), false},
		{"a lid", acpiEvent(30, "button/lid"), false},
		{"a longer class", acpiEvent(30, "button/powerful"), false},
		{"cut short", acpiEvent(30, "button/power")[:netlinkHeaders+10], false},
		{"nothing", nil, false},
	} {
		if got := isPowerButton(test.message, 30); got != test.want {
			t.Errorf("%s\nwant %v\ngot  %v", test.name, test.want, got)
		}
	}
}

// The test asks the running kernel for the family's numbers.
func TestWaitForThePowerButtonEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := AwaitPowerButton(ctx)
	if errors.Is(err, unix.ENOENT) {
		t.Skip("this kernel has no ACPI: go test -run TestVolumesGoOnWithoutVsock ./tests/vsock presses the button in a VM")
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("want %v\ngot  %v", context.Canceled, err)
	}
}

// A program in the guest may send to any netlink socket of its network namespace; its messages must
// not count as the kernel's.
func TestOnlyTheKernelPressesThePowerButton(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- AwaitPowerButton(ctx) }()
	var port uint32
	for port == 0 {
		select {
		case err := <-ended:
			t.Skipf("it waits for the power button: %v: run it where the kernel has ACPI", err)
		default:
			port, _ = listening(t)
		}
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_GENERIC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for family := uint16(unix.GENL_ID_CTRL); family < 100; family++ {
		if err := unix.Sendto(fd, acpiEvent(family, powerButton), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: port}); errors.Is(err, unix.EPERM) {
			t.Skip("it sends to a netlink socket: run it as root")
		} else if err != nil {
			break // AwaitPowerButton has ended
		}
	}
	for waiting := true; waiting; {
		_, waiting = listening(t)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("want %v\ngot  %v", context.Canceled, err)
	}
}

// listening looks in /proc/net/netlink for this process's socket of generic netlink that has joined
// a multicast group. It returns the socket's netlink port, or 0 if there is none, and whether
// messages are waiting in it. The columns are those of netlink_native_seq_show in
// net/netlink/af_netlink.c. Only a socket whose port is the process ID is found.
func listening(t *testing.T) (port uint32, hasMore bool) {
	t.Helper()
	text, err := os.ReadFile("/proc/net/netlink")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var socket, groups string
		var protocol, waiting int
		if _, err := fmt.Sscan(line, &socket, &protocol, &port, &groups, &waiting); err == nil && protocol == unix.NETLINK_GENERIC && int(port) == os.Getpid() && strings.Trim(groups, "0") != "" {
			return port, waiting > 0
		}
	}
	return 0, false
}

// familyAnswer returns the controller's answer.
func familyAnswer(group string) []byte {
	one := append(attribute(unix.CTRL_ATTR_MCAST_GRP_ID, []byte{5, 0, 0, 0}), attribute(unix.CTRL_ATTR_MCAST_GRP_NAME, append([]byte(group), 0))...)
	b := make([]byte, netlinkHeaders)
	binary.NativeEndian.PutUint16(b[4:], unix.GENL_ID_CTRL)
	b = append(b, attribute(unix.CTRL_ATTR_FAMILY_ID, []byte{30, 0})...)
	return append(b, attribute(unix.CTRL_ATTR_MCAST_GROUPS, attribute(1, one))...)
}

func TestGenericNetlinkIDsAreRead(t *testing.T) {
	if family, group, err := familyOf(familyAnswer(acpiGroup)); family != 30 || group != 5 || err != nil {
		t.Errorf("want 30 and 5\ngot  %d and %d, %v", family, group, err)
	}
	refusal := make([]byte, 20)
	binary.NativeEndian.PutUint16(refusal[4:], unix.NLMSG_ERROR)
	binary.NativeEndian.PutUint32(refusal[16:], ^uint32(unix.ENOENT)+1)
	if _, _, err := familyOf(refusal); !errors.Is(err, unix.ENOENT) {
		t.Errorf("want %v\ngot  %v", unix.ENOENT, err)
	}
	for _, bad := range [][]byte{nil, familyAnswer("other"), familyAnswer(acpiGroup)[:40]} {
		if _, _, err := familyOf(bad); err == nil {
			t.Errorf("%x: no error", bad)
		}
	}
}

func FuzzACPIEvent(f *testing.F) {
	f.Add(acpiEvent(30, "button/power"))
	f.Add(familyAnswer(acpiGroup))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, message []byte) {
		isPowerButton(message, 30)
		if family, group, err := familyOf(message); err == nil && (family == 0 || group == 0) {
			t.Errorf("%x: family %d, group %d", message, family, group)
		}
	})
}
