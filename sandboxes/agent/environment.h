/* What calls start in: the agent's own environment, what CONFIGURE added, and the configured user and directory. */
#ifndef ROLLWAY_ENVIRONMENT_H
#define ROLLWAY_ENVIRONMENT_H

#include <stdbool.h>

#include "request.h"

void environment_open(char **own);
/* Copies the configured values. 0 or a code of ERROR. */
int environment_configure(const struct configure_request *request);
const char *environment_user(void);
const char *environment_workdir(void);
/* The environment of one call: an array to be freed (its strings not), with a free place at its end; NULL without memory. */
char **environment_for(const struct strings *call, bool *home_given);

#endif
