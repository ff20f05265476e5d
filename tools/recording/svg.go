package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"math"
)

// The size of a character in the SVG, the margin around the terminal, and the time in seconds for
// which the last picture stays.
const (
	fontSize  = 12
	advance   = 7.225 // the width in DejaVu Sans Mono and similar fonts at that size
	rowHeight = 16
	margin    = 12
	rest      = 6
)

// movie is a recording, converted to the time of the SVG.
type movie struct {
	settings
	lines  []shown // in seconds of the recording
	length float64 // in seconds of the SVG
}

// writeSVG writes the rows' texts as an SVG that CSS animates. Each text is an element that is
// visible for its time, in percent of the whole; the rows scroll up as on a terminal. A viewer
// without animation shows the last picture.
func writeSVG(w io.Writer, set settings, lines []shown, seconds float64) error {
	m := movie{settings: set, lines: lines, length: seconds/set.speed + rest}
	var out bytes.Buffer
	width, height := float64(set.columns)*advance+2*margin, float64(set.rows*rowHeight+2*margin)
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" role="img">`+"\n", width, height)
	fmt.Fprintf(&out, "<title>%s</title>\n<style>\n", escaped(set.title))
	fmt.Fprintf(&out, "text{font:%dpx DejaVu Sans Mono,Menlo,Consolas,monospace;fill:#d8dee4;white-space:pre}\n", fontSize)
	fmt.Fprintf(&out, ".t,#rows{animation:%.2fs step-end infinite}\n", m.length)
	fmt.Fprint(&out, "@media(prefers-reduced-motion:reduce){.t,#rows{animation:none}}\n")
	m.scrolling(&out)
	for i, line := range lines {
		m.appearance(&out, i, line)
	}
	fmt.Fprintf(&out, "</style>\n<rect width=\"100%%\" height=\"100%%\" rx=\"6\" fill=\"#161b22\"/>\n")
	fmt.Fprintf(&out, "<svg x=\"%d\" y=\"%d\" width=\"%.0f\" height=\"%d\"><g id=\"rows\">\n", margin, margin, width-2*margin, set.rows*rowHeight)
	for i, line := range lines {
		fmt.Fprintf(&out, "<text class=\"t\" id=\"t%d\" y=\"%d\" xml:space=\"preserve\">%s</text>\n", i, line.row*rowHeight+fontSize, escaped(line.text))
	}
	fmt.Fprint(&out, "</g></svg>\n</svg>\n")
	_, err := w.Write(out.Bytes())
	return err
}

// percent converts a time of the recording into a keyframe's percentage.
func (m movie) percent(seconds float64) string {
	return fmt.Sprintf("%.3f%%", 100*seconds/m.speed/m.length)
}

// scrolling writes the movement of the rows: the last row with text is always visible.
func (m movie) scrolling(w io.Writer) {
	fmt.Fprint(w, "@keyframes scroll{0%{transform:none}")
	top, written := 0, 0
	for i, line := range m.lines {
		top = max(top, line.row-m.rows+1)
		if last := i == len(m.lines)-1; top > written && (last || m.lines[i+1].from > line.from) {
			written = top
			fmt.Fprintf(w, "%s{transform:translateY(-%dpx)}", m.percent(line.from), top*rowHeight)
		}
	}
	fmt.Fprintf(w, "}\n#rows{animation-name:scroll;transform:translateY(-%dpx)}\n", top*rowHeight)
}

// appearance writes the times at which a text appears and disappears.
func (m movie) appearance(w io.Writer, i int, line shown) {
	fmt.Fprintf(w, "@keyframes k%d{0%%{visibility:hidden}%s{visibility:visible}", i, m.percent(line.from))
	still := "visible"
	if !math.IsInf(line.until, 1) {
		still = "hidden"
		fmt.Fprintf(w, "%s{visibility:hidden}", m.percent(line.until))
	}
	fmt.Fprintf(w, "100%%{visibility:%s}}\n#t%d{animation-name:k%d;visibility:%s}\n", still, i, i, still)
}

// escaped returns text with the escapes of XML.
func escaped(text string) string {
	var out bytes.Buffer
	_ = xml.EscapeText(&out, []byte(text)) // writing to a buffer cannot fail
	return out.String()
}
