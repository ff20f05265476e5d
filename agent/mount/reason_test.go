package mount

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A socket of packets stands for the descriptor of fsopen(2): each read of it returns one message,
// and no filesystem says nine things about one mount.
func TestReasonsAreAsManyAsTheKernelKeeps(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	var want []string
	for i := range maxReasons + 1 {
		if _, err := unix.Write(pair[1], fmt.Appendf(nil, "e message %d\n", i)); err != nil {
			t.Fatal(err)
		}
		want = append(want, fmt.Sprintf("message %d", i))
	}
	for _, want := range [][]string{want[:maxReasons], want[maxReasons:], nil} {
		if got, want := Reason(withReason(pair[0], unix.EINVAL)), strings.Join(want, "; "); got != want {
			t.Errorf("want %s\ngot  %s", want, got)
		}
	}
}
