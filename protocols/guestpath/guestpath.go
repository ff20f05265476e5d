// Package guestpath computes where in a guest a volume is mounted. Kata Containers derives the path
// from the Storage's source, so that host and guest need not exchange it: a directory below Root
// whose name is the source in base64url with padding (RFC 4648, section 5).
package guestpath

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

// Root is the directory of the volumes' mount points.
const Root = "/run/kata-containers/sandbox/storage"

// MaxSource is the greatest length of a source, in bytes, whose encoding is still a valid file
// name: it then has 252 bytes of the 255 of NAME_MAX (linux/limits.h).
const MaxSource = 189

// Of returns the guest path of a Storage's source, such as "02/01".
func Of(source string) (string, error) {
	if err := check(source); err != nil {
		return "", fmt.Errorf("guest path of source %.200q: %w", source, err)
	}
	return Root + "/" + base64.URLEncoding.EncodeToString([]byte(source)), nil
}

// Source returns the source whose guest path is path. It accepts only results of Of, because path
// is untrusted.
func Source(path string) (string, error) {
	name, ok := strings.CutPrefix(path, Root+"/")
	if !ok || len(name) > base64.URLEncoding.EncodedLen(MaxSource) {
		return "", fmt.Errorf("guest path %.300q: want %s/ and the base64url of a source of at most %d bytes", path, Root, MaxSource)
	}
	decoded, err := base64.URLEncoding.Strict().DecodeString(name)
	if err != nil {
		return "", fmt.Errorf("guest path %q: %w", path, err)
	}
	source := string(decoded)
	if err := check(source); err != nil {
		return "", fmt.Errorf("guest path %q: %w", path, err)
	}
	if base64.URLEncoding.EncodeToString(decoded) != name { // the decoder skips line ends
		return "", fmt.Errorf("guest path %q: not the encoding of its source %q", path, source)
	}
	return source, nil
}

func check(source string) error {
	switch {
	case source == "":
		return errors.New("the source is empty")
	case len(source) > MaxSource:
		return fmt.Errorf("the source has %d bytes, a file name at most %d", len(source), MaxSource)
	case strings.ContainsRune(source, 0):
		return errors.New("the source contains a zero byte")
	}
	return nil
}
