/* Lasting shells: one process per name, which reads one script after the other from its stdin and says over a control pipe how each ended. */
#ifndef ROLLWAY_SESSION_H
#define ROLLWAY_SESSION_H

#include "call.h"

/* Runs a call of kind session: now, or when those before it in the same shell ended. `request` is the call's own. 0 or a code of ERROR. */
int session_run(struct call *call);
/* Takes a call out that still waits for its shell. */
void session_drop(struct call *call);

/* From jobs: its stdin takes more; its shell ended; ... and so did everything in it. */
void session_feed(struct session *session);
void session_shell_ended(struct session *session);
void session_dead(struct session *session);

#endif
