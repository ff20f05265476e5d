package main

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tools/agent-ctl/message"
)

// agent is a ttrpc server on a unix socket with every method of the protocol.
type agent struct {
	address string
	answer  func(ctx context.Context, method string, request proto.Message) (proto.Message, error)

	mu          sync.Mutex
	requests    []string // "METHOD {…}", in order
	connections int
}

// empty answers every method with an empty response.
func empty(context.Context, string, proto.Message) (proto.Message, error) { return nil, nil }

// newAgent serves on a new socket.
func newAgent(t *testing.T, answer func(context.Context, string, proto.Message) (proto.Message, error)) *agent {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	return serve(t, listen(t, path), "unix://"+path, answer)
}

func listen(t *testing.T, path string) net.Listener {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func serve(t *testing.T, l net.Listener, address string, answer func(context.Context, string, proto.Message) (proto.Message, error)) *agent {
	t.Helper()
	a := &agent{address: address, answer: answer}
	services := map[string]map[string]ttrpc.Method{agentpb.AgentServiceName: {}, agentpb.HealthServiceName: {}, volumepb.VolumeServiceName: {}}
	for _, m := range allMethods() {
		services[m.Service][m.Method] = a.method(m)
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	for name, methods := range services {
		server.RegisterService(name, &ttrpc.ServiceDesc{Methods: methods})
	}
	go server.Serve(context.Background(), &counted{l, a})
	t.Cleanup(func() { server.Close() })
	return a
}

func (a *agent) method(m service.MethodDesc) ttrpc.Method {
	return func(ctx context.Context, unmarshal func(any) error) (any, error) {
		request := m.NewRequest()
		if err := unmarshal(request); err != nil {
			return nil, err
		}
		a.mu.Lock()
		a.requests = append(a.requests, m.Method+" "+string(message.JSON(request)))
		a.mu.Unlock()
		response, err := a.answer(ctx, m.Method, request)
		if response == nil {
			response = m.NewResponse()
		}
		return response, err
	}
}

// seen returns the requests so far, one per line, and the number of connections.
func (a *agent) seen() (requests string, connections int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return strings.Join(a.requests, "\n"), a.connections
}

type counted struct {
	net.Listener
	agent *agent
}

func (l *counted) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.agent.mu.Lock()
		l.agent.connections++
		l.agent.mu.Unlock()
	}
	return conn, err
}

// hybrid answers "CONNECT PORT" for one port, as Firecracker's vsock device does (docs/vsock.md).
type hybrid struct {
	net.Listener
	port uint32
}

func (l hybrid) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		// The client sends nothing more before it has its answer, so the reader takes no byte of a
		// call.
		if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || line != fmt.Sprintf("CONNECT %d\n", l.port) {
			conn.Close()
			continue
		}
		if _, err := fmt.Fprint(conn, "OK 1073741824\n"); err == nil {
			return conn, nil
		}
		conn.Close()
	}
}
