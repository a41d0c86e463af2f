/* Reads the state file again whenever it was replaced, so that a test changes the GPUs of a running process. */

#define _GNU_SOURCE
#include "state.h"

#include <ctype.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct entry {
    const char *key;
    const char *value;
    size_t line;
};

/* Held for a look-up only, never while a call hangs: one GPU's hang does not reach the calls to the others. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *entries; /* by key; of lines with the same key the last one first */
static size_t entry_count;
static char *content;
static struct stat stamp;
static bool readable;

static int by_key(const void *left, const void *right)
{
    const struct entry *a = left, *b = right;
    int order = strcmp(a->key, b->key);
    return order ? order : (a->line < b->line) - (a->line > b->line);
}

static char *trimmed(char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1]))
        end--;
    *end = '\0';
    return text;
}

static void parse(void)
{
    size_t lines = 1;
    for (const char *c = content; *c; c++)
        lines += *c == '\n';
    entries = calloc(lines, sizeof *entries);
    char *rest = content;
    for (char *line; entries && (line = strsep(&rest, "\n"));) {
        char *equals = strchr(line, '=');
        if (!equals)
            continue;
        *equals = '\0';
        /* A comment with an equals sign makes a key that nobody looks up. */
        entries[entry_count] = (struct entry){trimmed(line), trimmed(equals + 1), entry_count};
        entry_count++;
    }
    qsort(entries, entry_count, sizeof *entries, by_key);
}

static void forget(void)
{
    free(entries);
    free(content);
    entries = NULL;
    content = NULL;
    entry_count = 0;
    readable = false;
}

static void load(const char *path)
{
    forget();
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    if (fstat(file, &stamp) == 0 && (content = calloc(1, (size_t)stamp.st_size + 1))) {
        readable = read(file, content, (size_t)stamp.st_size) == stamp.st_size;
        if (readable)
            parse();
    }
    close(file);
}

static void refresh(void)
{
    const char *path = getenv("FAKENVML_STATE");
    struct stat now;
    if (!path || stat(path, &now) != 0)
        forget();
    else if (!readable || now.st_ino != stamp.st_ino || now.st_size != stamp.st_size ||
             now.st_mtim.tv_sec != stamp.st_mtim.tv_sec || now.st_mtim.tv_nsec != stamp.st_mtim.tv_nsec)
        load(path);
}

bool state_readable(void)
{
    pthread_mutex_lock(&lock);
    refresh();
    bool result = readable;
    pthread_mutex_unlock(&lock);
    return result;
}

static bool look_up(char value[VALUE_SIZE], const char *key)
{
    pthread_mutex_lock(&lock);
    refresh();
    size_t low = 0, high = entry_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (strcmp(entries[middle].key, key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    bool found = low < entry_count && strcmp(entries[low].key, key) == 0;
    if (found)
        snprintf(value, VALUE_SIZE, "%s", entries[low].value);
    pthread_mutex_unlock(&lock);
    return found;
}

bool state_text(char value[VALUE_SIZE], const char *format, ...)
{
    char key[KEY_SIZE];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(key, sizeof key, format, arguments);
    va_end(arguments);
    return look_up(value, key);
}

uint64_t state_number(uint64_t fallback, const char *format, ...)
{
    char key[KEY_SIZE], value[VALUE_SIZE];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(key, sizeof key, format, arguments);
    va_end(arguments);
    uint64_t number;
    return look_up(value, key) && word_number(value, 0, &number) ? number : fallback;
}

bool word_number(const char *value, int word, uint64_t *number)
{
    char copy[VALUE_SIZE], *rest = copy, *found = NULL, *end;
    snprintf(copy, sizeof copy, "%s", value);
    for (int i = 0; i <= word; i++)
        if (!(found = strtok_r(rest, " \t", &rest)))
            return false;
    /* Base 0 would take a leading zero for octal. */
    int base = strncmp(found, "0x", 2) == 0 ? 16 : 10;
    *number = strtoull(found, &end, base);
    return *end == '\0';
}
