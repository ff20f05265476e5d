package measure

import (
	"math"
	"strconv"
	"strings"
)

// Quantity formats a figure with its unit, as short as possible.
func Quantity(v float64, unit string) string { return Number(v) + " " + unit }

// Number formats a figure with at least three digits, in groups of three.
func Number(v float64) string {
	decimals := 0
	for limit := 100.0; decimals < 2 && math.Abs(v) < limit; limit /= 10 {
		decimals++
	}
	if v == math.Trunc(v) {
		decimals = 0
	}
	whole, rest, dot := strings.Cut(strconv.FormatFloat(math.Abs(v), 'f', decimals, 64), ".")
	for at := len(whole) - 3; at > 0; at -= 3 {
		whole = whole[:at] + "," + whole[at:]
	}
	if dot {
		whole += "." + rest
	}
	if v < 0 {
		whole = "−" + whole
	}
	return whole
}
