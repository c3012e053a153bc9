/* Messages that span frames, put together. */
#ifndef ROLLWAY_MESSAGE_H
#define ROLLWAY_MESSAGE_H

#include <stddef.h>
#include <stdint.h>

#include "frame.h"

/* Adds a frame to the message of its type and call. 0 while more follow; 1 when `*bytes` and `*length` are the whole, until message_done is
 * called; else minus a code of ERROR, once: the rest of that message is dropped. */
int message_add(const struct frame *frame, uint8_t **bytes, size_t *length);
void message_done(void);
/* Another attacher took over: what was begun is dropped. */
void messages_drop(void);

#endif
