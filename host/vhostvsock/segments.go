package vhostvsock

// segments is a sequence of bytes in pieces, like a descriptor chain.
type segments [][]byte

// size returns the number of bytes in s.
func (s segments) size() int {
	n := 0
	for _, b := range s {
		n += len(b)
	}
	return n
}

// appendRange appends to dst the pieces that contain n bytes of s from offset skip on, or fewer if
// s ends before.
func (s segments) appendRange(dst segments, skip, n int) segments {
	for _, b := range s {
		if n == 0 {
			break
		}
		if skip >= len(b) {
			skip -= len(b)
			continue
		}
		b = b[skip:]
		skip = 0
		if len(b) > n {
			b = b[:n]
		}
		n -= len(b)
		dst = append(dst, b)
	}
	return dst
}

// copyTo copies bytes from the beginning of s to p and returns their number.
func (s segments) copyTo(p []byte) int {
	n := 0
	for _, b := range s {
		n += copy(p[n:], b)
	}
	return n
}

// copyFrom copies bytes from p to the beginning of s and returns their number.
func (s segments) copyFrom(p []byte) int {
	n := 0
	for _, b := range s {
		n += copy(b, p[n:])
	}
	return n
}
