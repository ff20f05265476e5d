// Package experiments has the measurements of the bench: the rows with their targets and floors,
// and the code that produces the values, most of it in one shared guest. Package measure has the
// rules that turn runs into a row.
package experiments
