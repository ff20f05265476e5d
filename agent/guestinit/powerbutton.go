package guestinit

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/netlink"
)

// The kernel reports ACPI events by generic netlink. Family and group are those of
// drivers/acpi/event.c, whose only attribute is a struct acpi_genl_event; the event's class is that
// of drivers/acpi/button.c.
const (
	acpiFamily     = "acpi_event"
	acpiGroup      = "acpi_mc_group"
	acpiCommand    = 1
	acpiAttribute  = 1
	acpiClassBytes = 20
	powerButton    = "button/power"
)

// netlinkHeaders is the size of a struct nlmsghdr and of the struct genlmsghdr after it.
const netlinkHeaders = unix.SizeofNlMsghdr + 4

// netlinkBytes is more than the kernel's longest message about a family.
const netlinkBytes = 16 << 10

// AwaitPowerButton returns nil when the host presses the guest's power button (QEMU's
// system_powerdown). It needs the module button. If ctx ends first, it returns ctx's error.
func AwaitPowerButton(ctx context.Context) error {
	socket, err := netlink.Open(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return err
	}
	defer socket.Close()
	stop := context.AfterFunc(ctx, func() { socket.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := socket.Write(familyRequest(acpiFamily)); err != nil {
		return err
	}
	var family, group uint32
	buffer := make([]byte, netlinkBytes)
	for {
		n, err := netlink.Receive(socket, buffer)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return context.Cause(ctx)
		case errors.Is(err, netlink.ErrForeign):
			continue
		case errors.Is(err, unix.ENOBUFS): // events were lost: the button can be pressed again
			continue
		case err != nil:
			return err
		}
		if group == 0 {
			if family, group, err = familyOf(buffer[:n]); err != nil {
				return err
			}
			if err := join(socket, group); err != nil {
				return err
			}
			continue
		}
		if isPowerButton(buffer[:n], family) {
			return nil
		}
	}
}

func join(socket *os.File, group uint32) error {
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	var refused error
	err = raw.Control(func(fd uintptr) {
		refused = unix.SetsockoptInt(int(fd), unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, int(group))
	})
	return errors.Join(err, os.NewSyscallError("setsockopt(NETLINK_ADD_MEMBERSHIP)", refused))
}

// familyRequest asks the controller for a family by name (linux/genetlink.h).
func familyRequest(name string) []byte {
	attribute := append([]byte(name), 0)
	length := unix.SizeofNlAttr + len(attribute)
	message := make([]byte, netlinkHeaders, netlinkHeaders+aligned(length))
	binary.NativeEndian.PutUint32(message, uint32(netlinkHeaders+aligned(length)))
	binary.NativeEndian.PutUint16(message[4:], unix.GENL_ID_CTRL)
	binary.NativeEndian.PutUint16(message[6:], unix.NLM_F_REQUEST)
	message[unix.SizeofNlMsghdr], message[unix.SizeofNlMsghdr+1] = unix.CTRL_CMD_GETFAMILY, 1
	message = binary.NativeEndian.AppendUint16(message, uint16(length))
	message = binary.NativeEndian.AppendUint16(message, unix.CTRL_ATTR_FAMILY_NAME)
	message = append(message, attribute...)
	return append(message, make([]byte, aligned(length)-length)...)
}

// familyOf parses the controller's answer and returns the numbers of the family and of its group.
func familyOf(message []byte) (family, group uint32, err error) {
	if len(message) >= unix.SizeofNlMsghdr+4 && binary.NativeEndian.Uint16(message[4:]) == unix.NLMSG_ERROR {
		errno := -int32(binary.NativeEndian.Uint32(message[unix.SizeofNlMsghdr:]))
		return 0, 0, fmt.Errorf("generic netlink family %s: %w", acpiFamily, unix.Errno(errno))
	}
	if len(message) < netlinkHeaders || binary.NativeEndian.Uint16(message[4:]) != unix.GENL_ID_CTRL {
		return 0, 0, fmt.Errorf("generic netlink family %s: the answer of %d bytes is malformed", acpiFamily, len(message))
	}
	attributes(message[netlinkHeaders:], func(kind uint16, value []byte) {
		switch {
		case kind == unix.CTRL_ATTR_FAMILY_ID && len(value) >= 2:
			family = uint32(binary.NativeEndian.Uint16(value))
		case kind == unix.CTRL_ATTR_MCAST_GROUPS:
			attributes(value, func(_ uint16, one []byte) {
				name, id := groupOf(one)
				if name == acpiGroup {
					group = id
				}
			})
		}
	})
	if family == 0 || group == 0 {
		return 0, 0, fmt.Errorf("generic netlink family %s: the kernel's answer lacks its id or its group's", acpiFamily)
	}
	return family, group, nil
}

func groupOf(attribute []byte) (name string, id uint32) {
	attributes(attribute, func(kind uint16, value []byte) {
		switch {
		case kind == unix.CTRL_ATTR_MCAST_GRP_NAME:
			name = text(value)
		case kind == unix.CTRL_ATTR_MCAST_GRP_ID && len(value) >= 4:
			id = binary.NativeEndian.Uint32(value)
		}
	})
	return name, id
}

// isPowerButton reports whether a message is from the family and reports a press of the button.
func isPowerButton(message []byte, family uint32) (pressed bool) {
	if len(message) < netlinkHeaders || uint32(binary.NativeEndian.Uint16(message[4:])) != family || message[unix.SizeofNlMsghdr] != acpiCommand {
		return false
	}
	attributes(message[netlinkHeaders:], func(kind uint16, value []byte) {
		if kind == acpiAttribute && len(value) >= acpiClassBytes {
			pressed = pressed || text(value[:acpiClassBytes]) == powerButton
		}
	})
	return pressed
}

// attributes calls each with the netlink attributes of a message, and stops at one that is longer
// than the rest.
func attributes(b []byte, each func(kind uint16, value []byte)) {
	for len(b) >= unix.SizeofNlAttr {
		length := int(binary.NativeEndian.Uint16(b))
		if length < unix.SizeofNlAttr || length > len(b) {
			return
		}
		each(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[unix.SizeofNlAttr:length])
		b = b[min(aligned(length), len(b)):]
	}
}

// aligned rounds up to NLA_ALIGNTO.
func aligned(length int) int { return (length + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1) }

// text returns the bytes before the first NUL.
func text(b []byte) string {
	before, _, _ := bytes.Cut(b, []byte{0})
	return string(before)
}
