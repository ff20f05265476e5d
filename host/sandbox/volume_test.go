package sandbox

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func newSandbox() *Sandbox { return &Sandbox{id: "test", volumes: map[string]*attached{}} }

func TestVolumeIDNamesADiskAndAContainer(t *testing.T) {
	for _, id := range []string{"", "x", "-x", "a/b", "a b", strings.Repeat("x", 26)} {
		if err := newSandbox().Attach(t.Context(), Volume{ID: id}); err == nil || !strings.Contains(err.Error(), "volume id") {
			t.Errorf("%q: want it refused\ngot  %v", id, err)
		}
	}
}

func TestVolumeThatIsNotAttachedIsNamed(t *testing.T) {
	s := newSandbox()
	_, statsErr := s.Stats(t.Context(), "data")
	_, mountErr := s.Mount(t.Context(), "data")
	for call, err := range map[string]error{
		"stats": statsErr, "mount": mountErr, "unmount": s.Unmount(t.Context(), "data"), "resize": s.Resize(t.Context(), "data", 1),
	} {
		if err == nil || !strings.Contains(err.Error(), "volume data is not attached to sandbox test") {
			t.Errorf("%s: want it refused by name\ngot  %v", call, err)
		}
	}
}

// Whoever waits for a volume that is given up meanwhile begins anew with it.
func TestVolumeIsReservedOnceAtATime(t *testing.T) {
	s := newSandbox()
	first, done := s.reserve(Volume{ID: "data"})
	reserved := make(chan *attached)
	go func() {
		second, done := s.reserve(Volume{ID: "data"})
		defer done()
		reserved <- second
	}()
	s.drop(first)
	done()
	if second := <-reserved; second == first || !s.current(second) {
		t.Error("it got an entry that was dropped")
	}
	if _, _, err := s.find("data"); err == nil {
		t.Error("a volume without a disk was found")
	}
}

// kata-agent is written in Rust, whose ttrpc has another code for it.
func TestAgentWithoutOurServiceIsKnownByItsAnswer(t *testing.T) {
	for err, want := range map[error]bool{
		status.Error(codes.Unimplemented, "service directvol.v1.VolumeService"):                                     true,
		status.Error(codes.InvalidArgument, "/directvol.v1.VolumeService/CheckResizeVolume service does not exist"): true,
		status.Error(codes.InvalidArgument, "volume path is not absolute"):                                          false,
		status.Error(codes.FailedPrecondition, "sparse_super2"):                                                     false,
	} {
		if got := lacksService(err); got != want {
			t.Errorf("%v\nwant %v\ngot  %v", err, want, got)
		}
	}
}
