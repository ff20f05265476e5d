package qemu

import (
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// proxy forwards QMP connections, with the files passed over them, and cuts one of them at a given
// byte.
type proxy struct {
	to string // QEMU's socket

	mu      sync.Mutex
	number  int      // connections so far
	which   int      // the connection that is cut, by its number
	left    [2]int   // bytes that it still forwards, to QEMU and from it; -1 for no limit
	cuts    int      // how many were cut
	carried [][2]int // bytes that each connection has forwarded since cutAt, to QEMU and from it
	open    []*net.UnixConn
}

const toQEMU, fromQEMU = 0, 1

// listenProxy returns a proxy for a socket, and the proxy's own socket.
func listenProxy(t *testing.T, to string) (*proxy, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "proxy.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{to: to}
	served := make(chan struct{})
	go func() { defer close(served); p.serve(l) }()
	t.Cleanup(func() { l.Close(); p.cutAll(); <-served })
	return p, path
}

// cutAt makes the proxy cut connection number which, 1 for the first, after it has forwarded the
// given number of bytes in one direction.
func (p *proxy) cutAt(which, direction, bytes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.which, p.left = which, [2]int{-1, -1}
	p.left[direction] = bytes
	for i := range p.carried {
		p.carried[i] = [2]int{} // count from now on
	}
}

// madeCuts returns how many connections were cut.
func (p *proxy) madeCuts() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cuts
}

// connections returns how many connections there were so far.
func (p *proxy) connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.number
}

// passed returns how many bytes a connection has forwarded since cutAt, to QEMU and from it.
func (p *proxy) passed(number int) [2]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.carried[number-1]
}

// cutAll cuts all present connections.
func (p *proxy) cutAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range p.open {
		conn.Close()
	}
	p.open = nil
}

func (p *proxy) serve(l net.Listener) {
	var pumps sync.WaitGroup
	defer pumps.Wait()
	for {
		client, err := l.Accept()
		if err != nil {
			return
		}
		qemu, err := net.Dial("unix", p.to)
		if err != nil {
			client.Close()
			continue
		}
		ends := [2]*net.UnixConn{client.(*net.UnixConn), qemu.(*net.UnixConn)}
		p.mu.Lock()
		p.number++
		number := p.number
		p.carried = append(p.carried, [2]int{})
		p.open = append(p.open, ends[0], ends[1])
		p.mu.Unlock()
		for direction := range ends {
			pumps.Go(func() {
				p.pump(number, direction, ends[direction], ends[1-direction])
				ends[0].Close()
				ends[1].Close()
			})
		}
	}
}

// pump forwards one direction of a connection until the connection ends or is cut.
func (p *proxy) pump(number, direction int, from, to *net.UnixConn) {
	b := make([]byte, 64<<10)
	for {
		n, files, err := readWithFiles(from, b)
		if err != nil {
			return
		}
		n, cut := p.allowed(number, direction, n)
		ok := n == 0 || pass(to, b[:n], files)
		for _, file := range files {
			file.Close()
		}
		if cut || !ok {
			return
		}
	}
}

func pass(to *net.UnixConn, b []byte, files []*os.File) bool {
	var fds []int
	for _, file := range files {
		fds = append(fds, int(file.Fd()))
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	sent, _, err := to.WriteMsgUnix(b, rights, nil)
	if err == nil && sent < len(b) {
		_, err = to.Write(b[sent:])
	}
	return err == nil
}

// allowed returns how many of n bytes may pass, and whether the connection is cut after them.
func (p *proxy) allowed(number, direction, n int) (int, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	cut := false
	if left := p.left[direction]; number == p.which && left >= 0 && n >= left {
		n, cut = left, true
		p.cuts++
	} else if number == p.which && left >= 0 {
		p.left[direction] -= n
	}
	p.carried[number-1][direction] += n
	return n, cut
}
