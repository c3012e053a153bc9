#define _GNU_SOURCE
#include "environment.h"

#include <stdlib.h>
#include <string.h>

#include "frame.h"

static char **own_items;
static struct strings own, configured;
static char *configured_user, *configured_workdir;
static bool configured_home;

void environment_open(char **items) {
    own_items = items;
    own.items = own_items;
    while (own.items[own.count] != NULL)
        own.count++;
    configured_user = strdup("");
    configured_workdir = strdup("/");
}

const char *environment_user(void) { return configured_user; }

const char *environment_workdir(void) { return configured_workdir; }

static size_t name_length(const char *pair) { return strcspn(pair, "="); }

static bool names(const struct strings *env, const char *pair, size_t length) {
    for (uint32_t i = 0; i < env->count; i++)
        if (strncmp(env->items[i], pair, length) == 0 && env->items[i][length] == '=')
            return true;
    return false;
}

static void free_strings(struct strings *strings) {
    for (uint32_t i = 0; i < strings->count; i++)
        free(strings->items[i]);
    free(strings->items);
    *strings = (struct strings){0};
}

static bool copy_strings(struct strings *copy, const struct strings *from) {
    *copy = (struct strings){.items = calloc(from->count + 1, sizeof(char *))};
    if (copy->items == NULL)
        return false;
    for (; copy->count < from->count; copy->count++)
        if ((copy->items[copy->count] = strdup(from->items[copy->count])) == NULL) {
            free_strings(copy);
            return false;
        }
    return true;
}

int environment_configure(const struct configure_request *request) {
    struct strings copy;
    char *user = strdup(request->user), *workdir = strdup(*request->workdir != '\0' ? request->workdir : "/");
    if (user == NULL || workdir == NULL || !copy_strings(&copy, &request->env)) {
        free(user);
        free(workdir);
        return ERROR_FULL;
    }
    free_strings(&configured);
    free(configured_user);
    free(configured_workdir);
    configured = copy;
    configured_user = user;
    configured_workdir = workdir;
    configured_home = names(&configured, "HOME", 4);
    return 0;
}

/* Appends those of `from` that neither of the two others names. */
static void append(char **env, uint32_t *count, const struct strings *from, const struct strings *over, const struct strings *over_too) {
    for (uint32_t i = 0; i < from->count; i++) {
        size_t length = name_length(from->items[i]);
        if (!names(over, from->items[i], length) && !names(over_too, from->items[i], length))
            env[(*count)++] = from->items[i];
    }
}

char **environment_for(const struct strings *call, bool *home_given) {
    static const struct strings none;
    char **env = malloc((call->count + configured.count + own.count + 2) * sizeof *env);
    uint32_t count = 0;
    if (env == NULL)
        return NULL;
    append(env, &count, call, &none, &none);
    append(env, &count, &configured, call, &none);
    append(env, &count, &own, call, &configured);
    env[count] = env[count + 1] = NULL;
    *home_given = configured_home || names(call, "HOME", 4);
    return env;
}
