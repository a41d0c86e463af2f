/* The state file: what the simulated driver and its GPUs answer, as lines `key = value`. */

#ifndef FAKENVML_STATE_H
#define FAKENVML_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

enum { KEY_SIZE = 128, VALUE_SIZE = 256 };

/* Tell whether the file named by FAKENVML_STATE can be read. */
bool state_readable(void);

/* Copy the value of the key that the format gives. False: there is no such key, and value is left as it was. */
__attribute__((format(printf, 2, 3))) bool state_text(char value[VALUE_SIZE], const char *format, ...);

/* Return the number that a key's value is; the fallback when there is no such key or the value is no number. */
__attribute__((format(printf, 2, 3))) uint64_t state_number(uint64_t fallback, const char *format, ...);

/* Parse one number, decimal or 0x hexadecimal, of a value made of words. False: no such word, or no number. */
bool word_number(const char *value, int word, uint64_t *number);

#pragma GCC visibility pop

#endif
