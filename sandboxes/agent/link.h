/* Byte streams to attachers: stdin and stdout, or accepted connections; and who the attacher of the moment is. */
#ifndef ROLLWAY_LINK_H
#define ROLLWAY_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "frame.h"

/* Called with each frame. `link` is what link_answer takes. */
struct link;
typedef void frame_handler(struct link *link, const struct frame *frame);
typedef void ended_handler(void);

/* Serves stdin and stdout; `ended` is called when stdin is at its end. */
void link_stdio(frame_handler *handle, ended_handler *ended);
/* Serves the connections to a listening socket. */
void link_listen(int fd, frame_handler *handle);

/* To the link and channel that a frame came from. */
void link_answer(struct link *link, const struct frame *asked, uint8_t type, const void *payload, uint32_t length);

/* Makes the channel that this frame came from the attacher of the moment; whether it is another one than before. */
bool attach(struct link *link, uint64_t channel);
bool attached(const struct link *link, uint64_t channel);
/* The channel of the moment, 0 where nobody is attached. */
uint64_t attacher_channel(void);

/* To the attacher of the moment. Short messages: they always fit, for what makes them waits while much is unsent. */
void attacher_send(uint8_t type, uint64_t call, const void *payload, uint32_t length);

/* For long ones: where a payload of PAYLOAD_MAX bytes may be put right now, or NULL when the attacher is slow or away. */
uint8_t *attacher_space(void);
/* Sends what was put there. */
void attacher_commit(uint8_t type, uint8_t flags, uint64_t call, uint32_t length);

/* Writes out what is unsent, as far as it goes, and takes up handling frames again where that had to wait. Once per turn of the loop, and
 * again while it returns true: there is room for more. */
bool links_flush(void);

#endif
