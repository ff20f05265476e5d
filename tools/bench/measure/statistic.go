package measure

import (
	"math"
	"slices"
)

// Quantile returns the smallest sample such that at least the fraction q of all samples does not
// exceed it (the nearest rank). It returns 0 if there are no samples.
func Quantile(samples []float64, q float64) float64 {
	if len(samples) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(samples))
	rank := int(math.Ceil(q * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// Median returns the middle sample, or the mean of the two middle samples.
func Median(samples []float64) float64 {
	if len(samples) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(samples))
	half := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[half]
	}
	return (sorted[half-1] + sorted[half]) / 2
}

// rounded rounds a figure to four decimals, which is more precise than the measurement.
func rounded(v float64) float64 { return math.Round(v*1e4) / 1e4 }

func allRounded(values []float64) []float64 {
	result := make([]float64, len(values))
	for i, v := range values {
		result[i] = rounded(v)
	}
	return result
}
