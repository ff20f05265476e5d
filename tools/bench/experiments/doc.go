// Package experiments is what the bench measures: the rows, with their targets and the floors that they are held against, and how each is brought
// about, most of them in one guest that they share. Package measure has the rules by which runs become a row; none are here.
package experiments
