package main

import (
	"context"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/logbuffer"
	"github.com/directvol/directvol/agent/transport"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/version"
)

// flushLimit bounds how long the log's readers may take when the agent ends.
const flushLimit = 2 * time.Second

// keptLog is the log's buffer and its outputs.
type keptLog struct {
	*logbuffer.Buffer
	console func()
}

// newLog makes logrus's standard logger, which ttrpc uses too, keep its lines until the output is
// known.
func newLog() (*logrus.Entry, *keptLog) {
	log := logrus.StandardLogger()
	j := logbuffer.New(log, logrus.Fields{"name": "directvol-agent", "source": "agent", "pid": strconv.Itoa(os.Getpid()), "version": version.String()})
	// Without this, a write to a console that is gone would end the process. If the signal were
	// ignored, the programs that a shell starts would ignore it too.
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)
	return logrus.NewEntry(log), &keptLog{j, sync.OnceFunc(func() {
		r := j.Reader()
		go r.CopyTo(context.Background(), os.Stderr)
	})}
}

// toConsole makes all lines go to the console, from the first one on.
func (k *keptLog) toConsole() { k.console() }

// toVsock serves the log to the host on a port, if that is not 0, until the process ends. If that
// fails, the log goes to the console.
func (k *keptLog) toVsock(port uint32, log *logrus.Entry) {
	if port == 0 {
		return
	}
	l, err := transport.ListenStreams(address.Address{Scheme: address.VSock, Port: port}, logbuffer.MaxReaders+1, log)
	if err != nil {
		log.Warnf("the log goes to the console: %v", err)
		k.toConsole()
		return
	}
	go func() {
		err := k.Serve(context.Background(), l)
		log.Warnf("the log goes to the console: %v", err)
		k.toConsole()
	}()
}

// flush waits, up to flushLimit, until the readers have all lines.
func (k *keptLog) flush() {
	ctx, cancel := context.WithTimeout(context.Background(), flushLimit)
	defer cancel()
	k.Flush(ctx)
}
