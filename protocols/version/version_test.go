package version

import "testing"

func TestReleaseHasTheNumberAlone(t *testing.T) {
	for in, want := range map[[2]string]string{
		{"v" + Number, "(devel)"}:                  Number,
		{"", "v" + Number}:                         Number,
		{"", "(devel)"}:                            Number + "-dev",
		{"", ""}:                                   Number + "-dev",
		{"4a491e6", "v" + Number}:                  Number + "-dev+4a491e6",
		{"v" + Number + "-dirty", ""}:              Number + "-dev+v" + Number + "-dirty",
		{"", "v0.0.0-20261122175706-4a491e6f9a0b"}: Number + "-dev",
	} {
		if got := text(in[0], in[1]); got != want {
			t.Errorf("source %q, module's version %q\nwant %s\ngot  %s", in[0], in[1], want, got)
		}
	}
}
