package main

import (
	"errors"
	"net"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"
)

func TestReadinessReachesASocketInAFolderAndInTheAbstractNamespace(t *testing.T) {
	for _, socket := range []string{filepath.Join(t.TempDir(), "notify"), "@directvol-notify-" + strconv.FormatInt(time.Now().UnixNano(), 36)} {
		listener, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		t.Setenv("NOTIFY_SOCKET", socket)
		if err := notifyReady(); err != nil {
			t.Errorf("%s: %v", socket, err)
			continue
		}
		got := make([]byte, 64)
		n, err := listener.Read(got)
		if want := "READY=1"; err != nil || string(got[:n]) != want {
			t.Errorf("%s\nwant %q\ngot  %q, %v", socket, want, got[:n], err)
		}
	}
}

func TestReadinessNeedsASocketOnlyIfOneIsNamed(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	if err := notifyReady(); err != nil {
		t.Errorf("without NOTIFY_SOCKET: %v", err)
	}
	t.Setenv("NOTIFY_SOCKET", filepath.Join(t.TempDir(), "nobody"))
	if err := notifyReady(); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("a socket that does not exist\nwant %v\ngot  %v", syscall.ENOENT, err)
	}
}
