package remote

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
)

// script is a guest that answers every request with the same lines and then ends the connection.
func script(lines string) *Client {
	return NewClient(func(context.Context, uint32) (net.Conn, error) {
		host, guest := net.Pipe()
		go func() {
			defer guest.Close()
			var req Request
			if NewLines(guest).Receive(&req) == nil {
				_, _ = guest.Write([]byte(lines))
			}
		}()
		return host, nil
	})
}

func TestClientBelievesNoGuestThatBreaksTheProtocol(t *testing.T) {
	ledger := NewLedger(512)
	if err := ledger.Record(Block{Bytes: 512, Sum: 7}); err != nil {
		t.Fatal(err)
	}
	read := func(c *Client) error { _, err := c.ReadAt(t.Context(), "/f", 0, 2); return err }
	verify := func(c *Client) error { _, err := c.Verify(t.Context(), "/f", ledger, nil); return err }
	write := func(c *Client) error {
		w, err := c.StartWriter(t.Context(), WriteBlocks{Path: "/f", BlockBytes: 512})
		if err != nil {
			return err
		}
		return w.Err()
	}
	for name, test := range map[string]struct {
		call  func(*Client) error
		lines string
		want  string
	}{
		"no answer":            {read, "", "without an answer"},
		"no JSON":              {read, "hello\n", "decode"},
		"result of other type": {read, `{"result":[]}` + "\n", "decode the guest's answer"},
		"more than asked for":  {read, `{"result":{"data":"AAAA"},"done":true}` + "\n", "3 bytes where 2 were asked for"},
		"no end":               {read, `{"result":{}}` + "\n" + `{"result":{}}` + "\n", "goes on"},
		"ack out of order":     {write, `{"result":{"index":1,"bytes":512}}` + "\n", "block 0 with 512 bytes comes next"},
		"writer cut off":       {write, `{"result":{"index":0,"bytes":512}}` + "\n", "without an answer"},
		"verify out of order":  {verify, `{"result":{"index":1,"bytes":512}}` + "\n", "answers for block 1"},
		"verify never ends":    {verify, strings.Repeat(`{"result":{"index":0,"bytes":512}}`+"\n"+`{"result":{"index":1,"bytes":512}}`+"\n", 2), "answers for block 1"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := test.call(script(test.lines)); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error\nwant: … %s …\n got: %v", test.want, err)
			}
		})
	}
}

func TestCallEndsWithItsContext(t *testing.T) {
	why := errors.New("the test has seen enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	asked := make(chan struct{})
	c := NewClient(func(context.Context, uint32) (net.Conn, error) {
		host, guest := net.Pipe()
		t.Cleanup(func() { guest.Close() })
		go func() {
			var req Request
			_ = NewLines(guest).Receive(&req)
			close(asked) // and never answer
		}()
		return host, nil
	})
	go func() { <-asked; cancel(why) }()
	if err := c.Sync(ctx, "/"); !errors.Is(err, why) {
		t.Errorf("error\nwant: %v\n got: %v", why, err)
	}
}
