package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode"

	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tools/agent-ctl/message"
)

// maxRequest is the maximum length of a request in JSON, in bytes. A ttrpc message has at most 4
// MiB, and base64 in JSON is longer by a third.
const maxRequest = 8 << 20

// call is a method and a request for it.
type call struct {
	service.MethodDesc
	request proto.Message
}

func parseCalls(commands []string) ([]call, error) {
	var calls []call
	for _, command := range commands {
		c, err := parseCall(command)
		if err != nil {
			return nil, fmt.Errorf("-c %.80q: %w", command, err)
		}
		calls = append(calls, c)
	}
	return calls, nil
}

// parseCall reads "METHOD", "METHOD json://{…}" or "METHOD file://PATH".
func parseCall(command string) (call, error) {
	name, rest := strings.TrimSpace(command), ""
	if i := strings.IndexFunc(name, unicode.IsSpace); i >= 0 {
		name, rest = name[:i], strings.TrimSpace(name[i:])
	}
	method, err := findMethod(name)
	if err != nil {
		return call{}, err
	}
	c := call{method, method.NewRequest()}
	if rest == "" {
		return c, nil
	}
	text, err := requestText(rest)
	if err != nil {
		return call{}, err
	}
	return c, message.Decode(text, c.request)
}

// allMethods returns the methods of Kata's services and of directvol's own service.
func allMethods() []service.MethodDesc { return slices.Concat(agentpb.Methods(), volumepb.Methods()) }

// findMethod finds a method by its name, regardless of case. No two services have a method of the
// same name.
func findMethod(name string) (service.MethodDesc, error) {
	for _, m := range allMethods() {
		if strings.EqualFold(m.Method, name) {
			return m, nil
		}
	}
	return service.MethodDesc{}, fmt.Errorf("unknown method %.80q: agent-ctl list shows all methods", name)
}

func requestText(request string) ([]byte, error) {
	if text, ok := strings.CutPrefix(request, "json://"); ok {
		return []byte(text), nil
	}
	path, ok := strings.CutPrefix(request, "file://")
	if !ok {
		return nil, fmt.Errorf("a request begins with json:// or file://, not %.40q", request)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxRequest+1))
	if err == nil && len(text) > maxRequest {
		err = fmt.Errorf("%s: more than %d bytes, too long for a request", path, maxRequest)
	}
	return text, err
}
