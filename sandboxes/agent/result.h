/* RESULT messages on their way: made piece by piece as the attacher takes them, from what the call keeps. */
#ifndef ROLLWAY_RESULT_H
#define ROLLWAY_RESULT_H

struct call;

/* Queues the result of a call that is done; does nothing while it is being sent. */
void result_send(struct call *call);
void result_drop(struct call *call);
void results_drop_all(void);
/* Sends what there is room for. */
void results_pump(void);

#endif
