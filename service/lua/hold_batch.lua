-- Extends a live batch, or hands it back. ARGV: batch id, lease_s or '' to hand back.
-- Reply: ok {lease_until}; gone: it is not live; missing.
if not read_job() then return reply('missing') end
local bid, lease_s, now = ARGV[1], tonumber(ARGV[2]), seconds()
expire_batches(now)
local b = load(BATCHES, bid)
if not b then return reply('missing') end
if b.state ~= 'live' then return reply('gone', { state = b.state }) end
if not lease_s then
  return_batch(bid, b, 'returned', now)
  return reply('ok', { lease_until = now })
end
b.lease_until = now + lease_s
call('ZADD', BATCH_LEASES, b.lease_until, bid)
save(BATCHES, bid, b)
return reply('ok', { lease_until = b.lease_until })
