package ctl

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/ttrpcframe"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

var update = flag.Bool("update", false, "write docs/kata-agent.md")

// place is an agent, and the parts of the guest that only its exchanges use.
type place struct {
	to          address.Address
	katas       bool   // the agent is Kata's
	dir         string // folder of its mount points, and of a container's root
	disk, spare string // PCI paths of two disks: one with an ext4, and an empty one
	node        string // node of disk, below /dev
	volume      string // a mount by our agent, about which both agents may be asked
}

// answersOf makes an agent answer every exchange.
func answersOf(t *testing.T, ctx context.Context, p place) {
	for _, e := range exchanges {
		want := e.ours
		if p.katas {
			want = e.kata
		}
		got, err := e.make(ctx, p, strings.Count(want, ",")+1)
		if err != nil || got != want {
			t.Errorf("%s\nwant %s\ngot  %s (error %v)", e.what, want, got, err)
		}
	}
}

// lastStream is the stream of a Check after all other calls. When the Check has been answered, no
// answer to a frame that the agent ignores can follow.
const lastStream = 1<<32 - 1

// make sends an exchange on its own connection, and returns the codes of its answers, with their
// streams if there are several.
func (e exchange) make(ctx context.Context, p place, answers int) (string, error) {
	conn, err := p.to.Dial(ctx)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Now()) })()
	sent := make(chan error, 1)
	go func() { sent <- e.sendTo(conn, p) }()
	var all []string
	for passed := false; !passed || len(all) < answers; {
		header, code, err := answer(conn)
		switch {
		case e.hangsUp && errors.Is(err, io.EOF):
			return strings.Join(append(all, hungUp), ", "), <-sent
		case err != nil:
			return strings.Join(all, ", "), err
		case header.StreamID == lastStream:
			passed = true
		default:
			all = append(all, fmt.Sprintf("%d %s", header.StreamID, name(code)))
		}
	}
	slices.Sort(all) // keeps the answers of one stream together
	if len(all) == 1 {
		all[0] = strings.TrimPrefix(all[0], "1 ")
	}
	return strings.Join(all, ", "), <-sent
}

// hungUp is the end of the answers to a client that has hung up.
const hungUp = "the end"

// sendTo sends the bytes of an exchange, and either the last Check or the end.
func (e exchange) sendTo(conn net.Conn, p place) error {
	all := e.send(p)
	if !e.hangsUp {
		all = append(all, health("Check", nil)(lastStream, 0)...)
	}
	each := max(1, len(all))
	if e.slowly {
		each = 1
	}
	for piece := range slices.Chunk(all, each) {
		if _, err := conn.Write(piece); err != nil {
			return err
		}
	}
	if e.hangsUp {
		return conn.(interface{ CloseWrite() error }).CloseWrite() // of a unix socket or a vsock
	}
	return nil
}

// answer receives one answer.
func answer(r io.Reader) (ttrpcframe.Header, codes.Code, error) {
	var first [ttrpcframe.HeaderBytes]byte
	if _, err := io.ReadFull(r, first[:]); err != nil {
		return ttrpcframe.Header{}, 0, err
	}
	header := ttrpcframe.ParseHeader(first[:])
	if header.Type != ttrpcframe.TypeResponse || header.Length > ttrpcframe.MaxLength {
		return header, 0, fmt.Errorf("no answer: %+v", header)
	}
	payload := make([]byte, header.Length)
	if _, err := io.ReadFull(r, payload); err != nil {
		return header, 0, err
	}
	var response ttrpc.Response
	err := proto.Unmarshal(payload, &response)
	return header, codes.Code(response.GetStatus().GetCode()), err
}

// name returns the name of a code in google/rpc/code.proto.
func name(code codes.Code) string {
	if code == codes.OK {
		return "OK"
	}
	var text strings.Builder
	for i, r := range code.String() {
		if i > 0 && r >= 'A' && r <= 'Z' {
			text.WriteByte('_')
		}
		text.WriteRune(r)
	}
	return strings.ToUpper(text.String())
}

// placeOf prepares disks, and a root for containers, in the guest.
func placeOf(t *testing.T, ctx context.Context, g *vm.Guest, id, to, volume string) place {
	t.Helper()
	parsed, err := address.Parse(to)
	vmtest.Must(t, err)
	p := place{to: parsed, dir: "/run/answers-" + id, volume: volume, katas: id == "kata"}
	image, err := vm.Scratch(ctx, g.Dir, "ext4", diskBytes)
	vmtest.Must(t, err)
	empty := g.Dir + "/empty-" + id
	vmtest.Must(t, os.WriteFile(empty, nil, 0o600))
	vmtest.Must(t, os.Truncate(empty, diskBytes))
	for _, d := range []struct{ id, path string }{{id + "-disk", image}, {id + "-spare", empty}} {
		attached, err := g.VM().AttachDisk(ctx, qemu.Disk{ID: d.id, Path: d.path, Serial: d.id})
		vmtest.Must(t, err)
		node, err := g.DeviceOf(ctx, d.id)
		vmtest.Must(t, err)
		if d.path == image {
			p.disk, p.node = attached.PCIPath, node
		} else {
			p.spare = attached.PCIPath
		}
	}
	program := p.dir + "/root" + testGuest
	vmtest.Must(t, g.Remote.Mkdir(ctx, p.dir+"/root/dev", 0o755))
	vmtest.Must(t, g.Remote.Mkdir(ctx, p.dir+"/root/proc", 0o755))
	vmtest.Must(t, g.Remote.WriteFile(ctx, program, nil))
	vmtest.Must(t, g.Remote.WriteFile(ctx, p.dir+"/file", nil))
	vmtest.Must(t, g.Remote.Mount(ctx, remote.Mount{Source: testGuest, Target: program, Flags: unix.MS_BIND}))
	return p
}

const (
	diskBytes = 16 << 20
	testGuest = "/test-guest" // the program in every test guest
)

const documented = "../../docs/kata-agent.md"

func TestDifferencesFromKatasAgentAreDocumented(t *testing.T) {
	text := "# Where our answers differ from kata-agent's\n\n" +
		"These calls and frames get another status code from directvol-agent than from kata-agent (as of August 2026). A test sends\n" +
		"them to both agents in one guest: `KATA_AGENT=PATH go test ./tests/ctl`. The table is made from that test's list, by\n" +
		"`go test ./tests/ctl -run Documented -update`.\n\n" +
		"| what is sent | we answer | kata-agent | because |\n|---|---|---|---|\n"
	for _, e := range exchanges {
		if (e.ours != e.kata) != (e.why != "") {
			t.Errorf("%s: %s and %s: because %q", e.what, e.ours, e.kata, e.why)
		}
		if e.why != "" {
			text += fmt.Sprintf("| %s | %s | %s | %s |\n", e.what, e.ours, e.kata, e.why)
		}
	}
	text += "\nOf the same volumes in the same guest, both agents report the same totals, used bytes and inodes. These fields differ:\n\n" +
		"| field | ours | kata-agent's | because |\n|---|---|---|---|\n"
	for _, f := range differing {
		text += fmt.Sprintf("| %s | %s | %s | %s |\n", f.what, f.ours, f.kata, f.why)
	}
	if *update {
		vmtest.Must(t, os.WriteFile(documented, []byte(text), 0o644))
	}
	if is, err := os.ReadFile(documented); err != nil || string(is) != text {
		t.Errorf("%s is not what the list says (error %v): run go test ./tests/ctl -run Documented -update", documented, err)
	}
}
