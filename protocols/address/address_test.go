package address

import (
	"strings"
	"testing"
)

func TestParseReadsWhatStringWrites(t *testing.T) {
	for text, want := range map[string]Address{
		"vsock://3:1024":                      {Scheme: VSock, CID: 3, Port: 1024},
		"vsock://4294967294:0":                {Scheme: VSock, CID: 4294967294},
		"hvsock:///run/vm/vsock.sock:1":       {Scheme: HVSock, Port: 1, Path: "/run/vm/vsock.sock"},
		"hvsock:///run/a:b:4294967294":        {Scheme: HVSock, Port: 4294967294, Path: "/run/a:b"},
		"unix:///run/agent.sock":              {Scheme: Unix, Path: "/run/agent.sock"},
		"unix://@/abstract":                   {Scheme: Unix, Path: "@/abstract"},
		"unix:///" + strings.Repeat("x", 102): {Scheme: Unix, Path: "/" + strings.Repeat("x", 102)},
	} {
		got, err := Parse(text)
		if err != nil {
			t.Error(err)
			continue
		}
		if got != want {
			t.Errorf("Parse(%q)\nwant %+v\ngot  %+v", text, want, got)
		}
		if got.String() != text {
			t.Errorf("String of %+v\nwant %s\ngot  %s", got, text, got)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for text, reason := range map[string]string{
		"":                                    "no scheme",
		"3:1024":                              "no scheme",
		"tcp://localhost:80":                  "unknown scheme",
		"vsock://3":                           "no port",
		"vsock://:1024":                       "context ID",
		"vsock://-1:1024":                     "context ID",
		"vsock://4294967295:1024":             "context ID",
		"vsock://3:":                          "port",
		"vsock://3:4294967295":                "port",
		"vsock://3:+1":                        "port",
		"hvsock:///run/vsock":                 "no port",
		"hvsock://vsock:1024":                 "absolute",
		"hvsock://@vsock:1024":                "absolute",
		"hvsock://:1024":                      "absolute",
		"unix://":                             "absolute",
		"unix://@":                            "absolute",
		"unix://relative":                     "absolute",
		"unix:///a\x00b":                      "zero byte",
		"unix:///" + strings.Repeat("x", 103): "104 bytes, the limit is 103",
	} {
		if got, err := Parse(text); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("Parse(%q)\nwant an error with %q\ngot  %+v, %v", text, reason, got, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"vsock://3:1024", "hvsock:///run/vsock:1024", "unix:///run/agent", "unix://@/abstract",
		"vsock://4294967295:1", "hvsock://:", "unix://", "://", "vsock://03:01", "hvsock:///a:b:1",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		a, err := Parse(text)
		if err != nil {
			return
		}
		if again, err := Parse(a.String()); err != nil || again != a {
			t.Errorf("Parse(%q)\nwant %+v\ngot  %+v, %v", a.String(), a, again, err)
		}
	})
}
