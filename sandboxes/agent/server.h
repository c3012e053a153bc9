/* What each frame asks for, and who may ask. */
#ifndef ROLLWAY_SERVER_H
#define ROLLWAY_SERVER_H

#include "link.h"

/* Makes the boot id. `features` as WELCOME tells them. */
void server_open(uint32_t features);
/* A frame came. */
void server_handle(struct link *link, const struct frame *frame);
/* Answers what had to wait. Once per turn of the loop. */
void server_turn(void);

#endif
